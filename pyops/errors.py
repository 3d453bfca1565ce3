"""The error of models, and of whoever serves them. `_core/errors.py` has those of ops and kernels."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder, or a request to a model, that cannot be served: ``where: what: message``."""

    def __init__(self, where: object, message: str) -> None:
        super().__init__(str(where), message)
        self.where, self.message = str(where), message

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


ModelError.__module__ = "pyops"
