"""What megamoe relies on in other libraries beyond their public interface, a module for each library.

A patch, an attribute that begins with an underscore, an internal list, a text of an error message: all of
these may change with any release. Each is behind a function or class here that says why it is needed, the
versions it was seen with, what happens without it, and which test in tests/compat fails when it is no longer
needed or no longer fits.

`startup` has the supported versions and is called first.
"""
