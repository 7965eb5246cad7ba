"""The Gaudi (HPU) backend."""
