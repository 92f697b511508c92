//! The local session, end to end.

use std::sync::Arc;

use kolo_core::{Code, Tensor};
use kolo_runtime::Session;

#[test]
fn constants_feeds_and_chains() {
    let g = kolo_ops::graph();
    let c = g.constant(3.0f32);
    let x = g.placeholder::<f32>("x", [None]);
    let y = x * c + 1.0;
    let session = Session::new(&g).unwrap();
    assert_eq!(session.fetch(c).unwrap(), Tensor::scalar(3.0f32));
    let fed = session.run(&[y, x], &[(x, Tensor::from([1.0f32, 2.0]))], &[]).unwrap();
    assert_eq!(fed, [Tensor::from([4.0f32, 7.0]), Tensor::from([1.0f32, 2.0])]);
    let error = session.fetch(y).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("You must feed a value for placeholder tensor 'x'"), "{error}");
    assert_eq!(session.run_named(&["x"], &[("x:0", Tensor::from([5.0f32]))], &[]).unwrap(), [Tensor::from([5.0f32])]);
}

#[test]
fn ten_thousand_adds_in_a_row() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [0usize; 0]);
    let one = g.constant(1.0f32);
    let y = (0..10_000).fold(x, |y, _| y + one);
    let session = Arc::new(Session::new(&g).unwrap());
    let callable = session.make_callable(&[x], &[y], &[]).unwrap();
    for _ in 0..3 {
        assert_eq!(callable.call(&[&Tensor::scalar(1.0f32)]).unwrap(), [Tensor::scalar(10_001.0f32)]);
    }
}
