"""Makes `import apex` work: finds, mirrors and fills in the package that scripts import.

Imports public names of the package.
"""
