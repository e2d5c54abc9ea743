"""For Lightning: a precision plugin, for scripts that import `pytorch_lightning`."""

from ampatch.integrations.common import needs
from ampatch.integrations.precision import PrecisionMethods

with needs("pytorch_lightning"):
    from pytorch_lightning.plugins import Precision

__all__ = ["AmpPrecisionPlugin"]


class AmpPrecisionPlugin(PrecisionMethods, Precision):
    """Trains in the mixed precision of ampatch; takes the arguments of `amp.initialize`.

    ```python
    trainer = pytorch_lightning.Trainer(plugins=AmpPrecisionPlugin(opt_level="O4"))
    ```
    """
