"""The runs in a storage path: find, list, read, follow, compare, export and delete them. Nothing is printed here.

Runs in: anywhere.
"""
