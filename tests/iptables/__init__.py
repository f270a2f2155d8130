"""The iptables mode."""
