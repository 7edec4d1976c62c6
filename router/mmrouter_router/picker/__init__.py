"""The endpoint picker: places the requests of a gateway's Envoy, which asks by ext_proc (docs/gateway.md)."""
