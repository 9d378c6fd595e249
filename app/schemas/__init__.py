"""Wire shapes, one module a dialect: pure functions between the wire and the domain."""
