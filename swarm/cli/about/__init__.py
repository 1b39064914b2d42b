"""Commands that tell of this installation itself, and run nothing: its settings with their origins (``show``), and how
shells complete its command lines (``completion``). What of it is not installed, for those who can't run without it
(``packages``)."""
