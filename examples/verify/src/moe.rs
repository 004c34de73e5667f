//! The second half of a layer: a dense MLP, or a router, the experts it picks and the shared expert. Routed and shared
//! parts are added before the all-reduce, so that one is enough.

use crate::device::Device;
use crate::pass::Activations;
use crate::shard::{ReplicatedLayer, ShardLayer};
use anyhow::Result;

/// Who decides which experts a row goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// The router.
    Own,
    /// Whoever wrote the routing before the pass: at low precision two right implementations may pick different experts.
    #[cfg_attr(not(any(test, feature = "cuda")), allow(dead_code))]
    Given,
}

/// From `normed` to `partial`.
pub fn partial<D: Device>(
    device: &mut D,
    common: &ReplicatedLayer<D::Weight>,
    own: &ShardLayer<D::Weight>,
    rows: usize,
    act: &mut Activations<D>,
    decision: Routing,
    routing: Option<&mut D::Routing>,
) -> Result<()> {
    let routed = match (&common.router, &own.routed, routing) {
        (Some((gate, bias)), Some(pool), Some(routing)) => {
            if decision == Routing::Own {
                device.gate_and_route(&act.normed, (gate, bias), &mut act.scores, routing, rows)?;
            }
            Some((&**pool, &*routing))
        }
        _ => None,
    };
    device.experts(&act.normed, &own.always, routed, &mut act.partial, rows)
}
