"""The built-in backends and the plugin that offers them."""
