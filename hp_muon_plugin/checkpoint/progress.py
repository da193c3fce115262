"""How far a conversion is, told to whoever shows it."""


class Progress:
    """Told how far a conversion is. This one shows nothing."""

    def begin(self, what: str, total: int) -> None:
        """Begin a stage.

        Args:
            what: Its name.
            total: Bytes.
        """

    def advance(self, nbytes: int) -> None:
        """Count bytes.

        Args:
            nbytes: Since the last call.
        """

    def note(self, text: str) -> None:
        """Say something that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""
