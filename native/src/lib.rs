//! Compiled forms of two loops and a table of mmrouter. The loops return `None` for unexpected input, and the Python
//! implementation then handles it and raises all errors.

mod holders;
mod keys;
mod payload;

use pyo3::prelude::*;

/// Version of the functions' interface and behaviour: `mmrouter/mmrouter_lib/native.py` uses no module of another one.
const REVISION: u32 = 2;

#[pymodule]
fn mmrouter_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("REVISION", REVISION)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<holders::HolderTable>()?;
    module.add_function(wrap_pyfunction!(keys::chain, module)?)?;
    module.add_function(wrap_pyfunction!(payload::pack_token_ids, module)?)
}
