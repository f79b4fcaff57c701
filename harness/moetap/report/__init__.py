"""Results as people and programs read them: tables, files.

Knows the result dataclasses of `moetap.analysis`, units and number formats. Refuses to compute a
figure: what is shown is what the analysis returned.
"""
