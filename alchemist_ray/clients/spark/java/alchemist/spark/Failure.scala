package alchemist.spark

import java.io.IOException

/** An error in the form of `mpi_workers.failures`: the name of an error class, and a message. */
private[spark] final class Failure(val fields: Map[String, Any])
    extends IOException(String.valueOf(fields.getOrElse("message", "")))

private[spark] object Failure {
  def apply(kind: String, message: String): Failure =
    new Failure(Map("kind" -> kind, "message" -> message, "facts" -> Map.empty))
}
