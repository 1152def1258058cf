"""Links carry requests and outputs between ingress and replica: protocol, TLS, send buffers, and what both ends must agree on."""
