// The work of a stream. Its failure becomes the communicator's asynchronous error, with a message.
#include "work.h"

#include <cstring>
#include <string>
#include <utility>

#include "standin.h"

namespace standin {
namespace {

struct Job {
  std::shared_ptr<Communicator> communicator;
  Work work;
};

void spoil(const Work& work) {
  if (work.output_bytes > 0) {
    std::memset(work.output, 0xff, work.output_bytes);
  }
}

// A failure must not fail the device: on a GPU only the communicator is lost.
void run(void* context) {
  const Job& job = *static_cast<Job*>(context);
  try {
    job.communicator->run_alone(job.work.call, [&] { job.work.body(*job.communicator); });
  } catch (const Aborted&) {
    spoil(job.work);
  } catch (const Failure& failure) {
    spoil(job.work);
    report(failure.what());
  }
}

void drop(void* context) { delete static_cast<Job*>(context); }

}  // namespace

void enqueue(const std::shared_ptr<Communicator>& communicator, cudaStream_t stream, Work work) {
  communicator->check();
  const char* const name = name_of(work.call.kind);
  communicator->order().enqueue(stream, [&] {
    const StandinWork standin_work{"collective", name, run, drop,
                                   new Job{communicator, std::move(work)}};
    const cudaError_t error = standin_enqueue(stream, &standin_work);
    if (error != cudaSuccess) {
      throw Failure(ncclUnhandledCudaError, std::string(name) + ": " + cudaGetErrorString(error));
    }
  });
  communicator->check();
}

}  // namespace standin
