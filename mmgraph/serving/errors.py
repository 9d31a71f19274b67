"""What can be wrong with the input of ``mmgraph run``; each message says what came and how to put it right."""

from __future__ import annotations


class ServingError(Exception):
    """Base of the errors that the serving loop raises for its user's input."""


class MissingExtraError(ServingError):
    """A package that an optional extra brings is not installed, or too old.

    Args:
        package: The package's name on the index.
        version: Which version is needed and which is here, where one is here.
    """

    def __init__(self, package: str, version: str = "") -> None:
        need = f"{package} {version}".strip()
        super().__init__(
            f"this command needs {need}, which is not installed: "
            'install the extras with: pip install "mmgraph[hf,photos]"'
        )
        self.package = package


class PhotoError(ServingError):
    """No photo can be read from where they were asked for."""


class ModelError(ServingError):
    """The model folder is missing, or holds something that this loop can't run."""


class RequestError(ServingError):
    """The numbers that describe the batch of requests make no sense."""


class DeviceChoiceError(ServingError):
    """The device or dtype that was asked for is unknown, or isn't there."""
