"""The wire protocol between ingress and replica, without IO: bytes in, messages out. docs/protocol.md describes it."""
