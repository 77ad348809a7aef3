"""Call Hydra's private application object, which alone has `--info`, `--hydra-help`, completion and foreign sweepers.

All else needs Hydra's public modules only.
"""

from __future__ import annotations

import inspect

import hydra

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError


def call_application(composer: Composer, feature: str, method: str, **arguments: object) -> None:
    """Call a method of the object.

    Args:
        composer: that has the object.
        feature: that needs it, as typed.
        method: its name.
        arguments: of the method.

    Raises:
        ConfigError: the installed release has no such method, or one with other arguments. Mistakes in the overrides
            raise `MISTAKES`.
    """
    try:
        function = getattr(composer.application, method)
        inspect.signature(function).bind(**arguments)
    except (AttributeError, TypeError) as error:
        problem = f"has no {feature} that hpctrain can call"
        remedy = "install a release with which it was tested: 1.3.8 or 1.4.0rc3"
        raise ConfigError("hydra-core", hydra.__version__, problem, remedy) from error
    function(**arguments)
