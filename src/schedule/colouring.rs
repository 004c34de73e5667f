//! Proper edge colouring of a bipartite graph with as few colours as its largest degree (Koenig's theorem).

/// Colours `edges` between `left` and `right` vertices so that no two edges of one vertex share a colour. Returns a colour
/// per edge and the number of colours, which is the largest degree. Edges are distinct.
///
/// Per edge (u, v): `a` is a colour free at u, `b` one free at v. If a is taken at v, the path from v that alternates a, b, a...
/// is flipped. It cannot end in u: the graph is bipartite, so the path would enter u by colour a, which is free there.
pub(super) fn colour(edges: &[(u8, u8)]) -> (Vec<usize>, usize) {
    let (mut left, mut right) = ([0usize; 256], [0usize; 256]);
    for &(u, v) in edges {
        left[u as usize] += 1;
        right[v as usize] += 1;
    }
    let colours = left.into_iter().chain(right).max().unwrap_or(0);
    let mut colour_of: Vec<Option<usize>> = vec![None; edges.len()];
    for edge in 0..edges.len() {
        let (u, v) = edges[edge];
        // A vertex has at most `colours` edges and this one is not coloured yet, so a colour is free.
        let free = |colour_of: &[Option<usize>], right: bool, vertex: u8| {
            (0..colours).find(|&c| at(edges, colour_of, right, vertex, c).is_none()).unwrap_or(0)
        };
        let (a, b) = (free(&colour_of, false, u), free(&colour_of, true, v));
        let mut path = Vec::new();
        let (mut right, mut vertex, mut wanted) = (true, v, a);
        while let Some(next) = at(edges, &colour_of, right, vertex, wanted) {
            path.push(next);
            vertex = if right { edges[next].0 } else { edges[next].1 };
            right = !right;
            wanted = if wanted == a { b } else { a };
        }
        for &e in &path {
            colour_of[e] = colour_of[e].map(|c| if c == a { b } else { a });
        }
        colour_of[edge] = Some(a);
    }
    (colour_of.into_iter().map(|c| c.unwrap_or(0)).collect(), colours)
}

/// The edge of `vertex` that has colour `wanted`.
fn at(
    edges: &[(u8, u8)],
    colour_of: &[Option<usize>],
    right: bool,
    vertex: u8,
    wanted: usize,
) -> Option<usize> {
    (0..edges.len()).find(|&e| {
        colour_of[e] == Some(wanted) && vertex == if right { edges[e].1 } else { edges[e].0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_edges_of_a_vertex_share_a_colour_and_none_is_wasted() {
        let mut seed = 1u64;
        for round in 0..500 {
            let mut edges = Vec::new();
            for u in 0..8u8 {
                for v in 0..8u8 {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    if (seed >> 60) < round % 15 + 1 {
                        edges.push((u, v));
                    }
                }
            }
            let (colour_of, colours) = colour(&edges);
            let degree = (0..8u8)
                .flat_map(|x| {
                    [
                        edges.iter().filter(|e| e.0 == x).count(),
                        edges.iter().filter(|e| e.1 == x).count(),
                    ]
                })
                .max()
                .unwrap();
            assert_eq!(colours, degree, "round {round}");
            for i in 0..edges.len() {
                assert!(colour_of[i] < colours, "round {round}");
                for j in 0..i {
                    let touching = edges[i].0 == edges[j].0 || edges[i].1 == edges[j].1;
                    assert!(!touching || colour_of[i] != colour_of[j], "round {round}: {edges:?}");
                }
            }
        }
    }
}
