"""HTTP as every room of the ingress may use it: connections, limits of heads and bodies, API keys, errors as answers."""
