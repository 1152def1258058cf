"""`UiSettings` says where `serve-app up` serves the chat page and the fleet page."""

from pydantic import Field

from serve_app.config.base import Int, Section


class UiSettings(Section):
    """The pages that `serve-app up` starts in a process of their own, if Gradio is installed. On Kubernetes the chart has them."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. The pages have no login: whoever reaches them can send what the service accepts without a key."""
    port: Int = Field(default=8011, ge=1024, le=65535)
    """Port to listen on. While it is taken, the service runs without the pages."""
