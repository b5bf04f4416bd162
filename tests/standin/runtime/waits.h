// The host's waits, which the log shows by the names of the calls.
#pragma once

#include "settings.h"
#include "standin.h"

namespace standin {

inline void log_wait(const char* name) {
  standin_log("wait", name);
  trace(std::string("the host waits: ") + name);
}

}  // namespace standin
