// User objects, which must live as long as a graph, with their destroying functions.
//
// References are counted under the scheduler's lock; the destroying function runs without it.
#include "errors.h"
#include "graph.h"
#include "scheduler.h"
#include "standin.h"

namespace standin {

void release_object(cudaUserObject_t object, unsigned count) {
  {
    const Lock lock = Scheduler::get().lock();
    object->num_references -= count;
    if (object->num_references != 0) {
      return;
    }
  }
  object->destroy(object->object);
  delete object;
}

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object,
                                             cudaHostFn_t destroy, unsigned num_references,
                                             unsigned) {
  if (destroy == nullptr || num_references == 0) {
    return fail(cudaErrorInvalidValue, "a user object needs a destructor and a reference");
  }
  *handle = new CUuserObject_st{object, destroy, num_references};
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  release_object(object, count);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                                  unsigned count, unsigned flags) {
  const Lock lock = Scheduler::get().lock();
  graph->objects[object] += count;
  if ((flags & cudaGraphUserObjectMove) ==
      0) {  // otherwise the caller's references are the graph's
    object->num_references += count;
  }
  return cudaSuccess;
}
