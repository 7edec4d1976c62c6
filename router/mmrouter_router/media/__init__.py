"""Resolution of media: ``data:`` URIs and guarded http(s) fetches. Only routers fetch; engines get bytes."""
