//! Variables that move to a GPU and back, and links that are measured with one.

use std::sync::Arc;

use kolo_graph::{CostModel, VariableKind};

use super::*;

#[test]
fn a_variable_moves_to_the_gpu_and_back() {
    on_gpu(|| {
        for kind in [VariableKind::Resource, VariableKind::Reference] {
            let g = kolo_ops::graph();
            let v = g.device("/cpu:0", || g.new_variable("v", vec![1.0f32; 1000]).kind(kind).build());
            let add = v.assign_add(g.constant(vec![1.0f32; 1000]));
            let init = g.global_variables_initializer();
            let session = Arc::new(Session::with_config(&g, config(exact())).unwrap());
            session.run_op(init).unwrap();
            let callable = session.make_callable(&[], &[], &[add]).unwrap();
            let mut expected = 1.0f32;
            for device in ["/gpu:0", "/cpu:0", "/gpu:0", "/cpu:0"] {
                session.local().unwrap().move_node("v", device).unwrap();
                let found = session.fetch(v.read()).unwrap();
                assert_eq!(found, Tensor::from(vec![expected; 1000]), "{kind:?} on {device}");
                // Often enough for the step to be captured on the GPU.
                for _ in 0..6 {
                    callable.call(&[]).unwrap();
                    expected += 1.0;
                }
                let found = session.fetch(v.read()).unwrap();
                assert_eq!(found, Tensor::from(vec![expected; 1000]), "{kind:?} on {device}");
            }
        }
    });
}

#[test]
fn a_variable_moves_between_two_gpus() {
    on_gpu(|| {
        let mib = 1u64 << 20;
        let gpu = GpuOptions { virtual_devices: [(0, vec![64 * mib, 64 * mib])].into(), ..exact() };
        let g = kolo_ops::graph();
        let value = wavy(&[300_001], 5);
        let v = g.device("/gpu:0", || g.variable("v", value.clone()));
        let init = g.global_variables_initializer();
        let session = Session::with_config(&g, config(gpu)).unwrap();
        session.run_op(init).unwrap();
        for device in ["/gpu:1", "/cpu:0", "/gpu:1", "/gpu:0"] {
            session.local().unwrap().move_node("v", device).unwrap();
            assert_eq!(session.fetch(v.read()).unwrap(), value, "on {device}");
        }
    });
}

#[test]
fn links_with_a_gpu_are_measured() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let session = Session::with_config(&g, config(exact())).unwrap();
        let mut costs = CostModel::default();
        session.local().unwrap().measure_links(&mut costs).unwrap();
        println!("{costs}");
        for link in ["link CPU GPU ", "link GPU CPU "] {
            assert!(costs.to_string().contains(link), "'{link}' is missing in:\n{costs}");
        }
    });
}
