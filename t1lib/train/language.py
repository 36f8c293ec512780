from t1lib.text.session import LanguageSession, from_params  # noqa: F401 (for the notebooks)
