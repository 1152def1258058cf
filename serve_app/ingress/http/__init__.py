"""The HTTP room serves the other rooms of the ingress: connections, limits of heads and of values, API keys, errors as answers."""
