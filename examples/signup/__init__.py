"""A small web application that signs people up and welcomes them by e-mail."""
