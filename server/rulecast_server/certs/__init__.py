"""`rulecast certs`: an authority of our own and the servers' certificate, kept valid without anything else.

Layers: command, then places (where they are kept), then plan (what is missing), then pki (openssl).
"""
