//! A device function: variables on `/cpu:0`, products on `/cpu:1`, the rest where the placer likes.
//!
//! ```text
//! $ cargo run --example device_function
//! w: (VarHandleOp): /job:localhost/replica:0/task:0/device:CPU:0
//! MatMul: (MatMul): /job:localhost/replica:0/task:0/device:CPU:1
//! y = float[1,2] [13.0, 17.0]
//! ```

use std::collections::BTreeMap;

use kolo::{DeviceSpec, Node, Result, Session, SessionConfig, Tensor, ops};

fn choose(node: &Node) -> DeviceSpec {
    let device = match node.op() {
        "VarHandleOp" => "/cpu:0",
        "MatMul" => "/cpu:1",
        _ => "",
    };
    DeviceSpec::parse(device).expect("written above")
}

fn main() -> Result<()> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [None, Some(2)]);
    let (y, init) = g.device_fn(choose, || {
        let w = g.variable("w", [[1.0f32, 2.0], [3.0, 4.0]]);
        let y = ops::matmul(x, w.read()) + 3.0;
        (y, g.global_variables_initializer())
    });
    let config = SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), 2)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    let value = session.run(&[y], &[(x, Tensor::from([[1.0f32, 3.0]]))], &[])?;
    for row in session.local()?.placement().rows.iter().filter(|row| ["w", "MatMul"].contains(&row.node.as_str())) {
        println!("{}", row.log_line());
    }
    println!("y = {:?}", value[0]);
    Ok(())
}
