"""An accelerator plugin for rlhf to copy: `plugin` offers the backend, `backend` implements it."""
