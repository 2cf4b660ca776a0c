"""Clients: data of other systems becomes a matrix, and a matrix becomes theirs.

Each system is a module or package here, imported when data of that system is met
(`transfer.sources`). None of them needs another.
"""
