"""The ui room is the chat page and the fleet page (`serve-app ui`): a client of the HTTP API in a process of its own.

Only ``app.py``, ``chat_page.py`` and ``fleet_page.py`` import Gradio. The other modules decide what is asked and shown, without Gradio.
"""
