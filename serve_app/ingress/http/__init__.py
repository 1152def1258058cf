"""This room has HTTP for all other rooms of the ingress: connections, limits of heads and bodies, API keys, errors as answers."""
