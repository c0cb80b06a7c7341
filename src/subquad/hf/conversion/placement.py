"""Where a module computes, which is not always where its weights are: accelerate keeps some elsewhere until they are
needed (`device_map` with "cpu" or "disk"), and leaves weights without values (device "meta") in their place.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["device_of"]


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's calls: its first weight's, or the one that accelerate brings the weights to.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    devices = (x.device for x in (*module.parameters(), *module.buffers()))
    first = next(devices, torch.device("cpu"))
    if first.type != "meta":
        return first
    for part in module.modules():
        hooks = getattr(part, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):  # one, or several in a row
            where = getattr(hook, "execution_device", None)
            if where is not None:
                return torch.device(where)
    raise ValueError(
        f"{type(module).__name__} has weights without values (device 'meta'): load them first, with from_pretrained "
        "or load_state_dict(..., assign=True)"
    )
