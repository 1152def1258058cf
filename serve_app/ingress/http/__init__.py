"""This room has HTTP for all other rooms of the ingress: connections, limits of heads and of values in bodies, API keys, errors as answers."""
