"""The sections of the configuration file; `serve_app.config` puts them together and is what others import."""
