"""Certificates of devices: levels of checks, each in separate processes, and a report that users can send.

`runner.py` runs the checks of the levels (`levels.py`), and writes the page (`page.py`) and the bundle (`bundle.py`).
The process of the command opens no device: everything that does runs in a process of `tasks.py`, or is an `rlhf`
command. So a device that crashes ends one check, not the report.
"""
