"""Code that `model_download` runs by the Python of a profile's host: Python 3.9 and no library."""
