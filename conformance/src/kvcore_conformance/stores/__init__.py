"""The conformance suite of stores: what a store promises, against any store.

``pytest --pyargs kvcore_conformance.stores --kvcore-store URI`` runs it; docs/write-a-store.md says how a package puts
a store of its own to it.
"""
