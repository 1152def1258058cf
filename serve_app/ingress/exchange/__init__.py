"""An exchange is one HTTP request at the ingress: what it asked, what the client was sent, and how it ended."""
