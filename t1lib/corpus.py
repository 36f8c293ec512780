from t1lib.files import cache_folder  # noqa: F401 (for t1lib.machine)
