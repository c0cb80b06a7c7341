"""The one place that states the version; the build reads it with a regular expression."""

__version__ = "0.2.0"
