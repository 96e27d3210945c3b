"""The web page: a chat, the state of the fleet, and the description of the API."""
