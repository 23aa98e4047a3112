"""How many instances to ask of the agents: fewer under load, all again when it is over.

The agents send every instance whose sequence number is a multiple of the stride, so the stride is
a power of two: what one stride samples, a smaller one samples too. It doubles after every window
in which something did not fit, and halves after a calm minute. Where halving turns out to have been
too much, the next try waits twice as long, so that a steady overload does not make it swing.
"""

from __future__ import annotations

CALM_SECONDS = 60.0
LONGEST_CALM_SECONDS = 16 * CALM_SECONDS


class Stride:
    """`close` once a window; `crowded` at any time, from any thread."""

    def __init__(self, window_seconds: float, most: int) -> None:
        self.value = 1
        self._window_seconds = window_seconds
        self._most = most
        self._crowded = False
        self._calm = 0.0  # seconds
        self._patience = CALM_SECONDS
        self._on_trial = False  # halved, and not yet calm for long since

    def crowded(self) -> None:
        """More came in this window than could be kept or worked off."""
        self._crowded = True

    def close(self) -> None:
        """A window has ended: choose for the next."""
        crowded, self._crowded = self._crowded, False
        if crowded:
            if self._on_trial:
                self._patience = min(2 * self._patience, LONGEST_CALM_SECONDS)
            self.value = min(2 * self.value, self._most)
            self._calm, self._on_trial = 0.0, False
            return
        self._calm += self._window_seconds
        if self._on_trial and self._calm >= CALM_SECONDS:
            self._patience, self._on_trial = CALM_SECONDS, False
        if self.value > 1 and self._calm >= self._patience:
            self.value //= 2
            self._calm, self._on_trial = 0.0, True
