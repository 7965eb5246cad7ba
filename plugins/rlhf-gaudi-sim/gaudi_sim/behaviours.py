"""Behaviours of the real bridge that plain torch on a CPU lacks: on by default, each with its source and a name.

RLHF_GAUDI_SIM_WITHOUT=NAME,... turns some of them off, to see what each changes. Imports no torch.
"""

from __future__ import annotations

import os

from accelerators import AcceleratorError

WITHOUT_VARIABLE = "RLHF_GAUDI_SIM_WITHOUT"

BEHAVIOURS = {
    "average": "hccl has no AVG (github.com/soumyarani/verl-gaudi: 'HCCL has no AVG')",
    "empty_rows": "FusedSDPA gives NaN on rows that see nothing (GAUDI_FAILURE_LOG.md, F29, F39 and F42, of "
    "github.com/krisDlittleGiant/Self-Play-Reinforcement-learning, on a Gaudi2)",
    "host_tensors": "hccl takes tensors of the device only",
    "logs": "a HABANA_LOGS that cannot be written ends the process (logs in verl-gaudi)",
    "modules": "rank N opens module N, chosen at import, if HABANA_VISIBLE_MODULES does not name modules, as numbers "
    "(gaudi-pytorch-bridge, distributed/hccl/__init__.py and _utils.py)",
    "save": "lazy mode replaces torch.save and torch.load (gaudi-pytorch-bridge 1.19, torch_overwrites.py)",
    "set_data": "`parameter.data = ...` is refused between host and device (verl-gaudi, docs/02 and 03)",
    "weight_sharing": "lazy mode keeps all parameters (gaudi-pytorch-bridge 1.19, core/weight_sharing.py)",
}
"""Names, each with what it is and who says so."""


def is_simulated(name: str) -> bool:
    """Return whether a behaviour is on.

    Raises:
        AcceleratorError: RLHF_GAUDI_SIM_WITHOUT names one that does not exist.
    """
    without = {part.strip() for part in os.environ.get(WITHOUT_VARIABLE, "").split(",")} - {""}
    if unknown := sorted(without - BEHAVIOURS.keys()):
        raise AcceleratorError(
            f"{WITHOUT_VARIABLE}: {unknown[0]!r} is no behaviour of the simulation; use {', '.join(BEHAVIOURS)}"
        )
    return name not in without
