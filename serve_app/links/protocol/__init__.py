"""The wire protocol between ingress and replica, without IO, turns bytes into messages and back. docs/protocol.md describes it."""
