"""Packets followed through the compiled rules, without a kernel.

`ruleset` reads what nft would be told, `tracer` follows a packet through it and gives the share of each
outcome exactly, `oracle` says from the services alone what should come out.
"""
