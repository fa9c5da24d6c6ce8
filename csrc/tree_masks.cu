// Packed ancestor masks and depths of a tree, from its parents.
//
// One block for each 32 columns, and one for the depths. In a block every node holds what it has gathered from its nearest
// 2^k ancestors, itself included, and the name of the next one: a round adds what that one holds and doubles the reach, so a
// chain of n nodes takes log2(n) rounds and not n. Ancestors are distinct, so gathering bits is adding them, and the same
// rounds count the depth.
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 512;
constexpr int kRoot = -1;

struct Node {
  uint32_t gathered;
  int next;
};

__device__ Node start_of(const TreeMasks& args, int node, int column) {
  const int64_t parent = args.parents[node];
  // A parent that does not stand before its child cannot send a round outside the arrays.
  const int next = parent >= 0 && parent < node ? static_cast<int>(parent) : kRoot;
  if (column == args.words) return {next == kRoot ? 0u : 1u, next};
  return {node / 32 == column ? 1u << (node % 32) : 0u, next};
}

__global__ void __launch_bounds__(kThreads) tree_masks_kernel(TreeMasks args) {
  Node* from = reinterpret_cast<Node*>(shared_memory());
  Node* to = from + args.n;
  const int column = blockIdx.x;
  for (int node = threadIdx.x; node < args.n; node += kThreads) from[node] = start_of(args, node, column);
  sync_block();
  for (int reach = 1; reach < args.n; reach *= 2) {
    for (int node = threadIdx.x; node < args.n; node += kThreads) {
      Node own = from[node];
      if (own.next != kRoot) {
        const Node above = from[own.next];
        own = {own.gathered + above.gathered, above.next};
      }
      to[node] = own;
    }
    sync_block();
    Node* swapped = from;
    from = to;
    to = swapped;
  }
  for (int node = threadIdx.x; node < args.n; node += kThreads) {
    const int32_t value = static_cast<int32_t>(from[node].gathered);
    if (column == args.words)
      args.depths[node] = value;
    else
      args.masks[static_cast<int64_t>(node) * args.words + column] = value;
  }
}

}  // namespace

void tree_masks(const TreeMasks& args, cudaStream_t stream) {
  launch(tree_masks_kernel, dim3(args.words + 1), kThreads, 2 * sizeof(Node) * args.n, stream, args);
}

}  // namespace offload_rt
