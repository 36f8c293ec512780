from t1lib.measure.language import LanguageSession, from_params  # noqa: F401 (for the notebooks convergence and cce)
