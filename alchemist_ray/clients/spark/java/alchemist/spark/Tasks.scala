package alchemist.spark

import scala.reflect.ClassTag

import org.apache.spark.{Partition, TaskContext}
import org.apache.spark.rdd.{PartitionCoalescer, PartitionGroup, RDD}
import org.apache.spark.sql.execution.columnar.Internals

/** A function of each partition of an RDD. Spark's own `mapPartitions` and `collect` read the class
  * files of their functions again for each job, which takes longer than a small job.
  */
private[spark] final class PartitionTasks[T: ClassTag, U: ClassTag](
    parent: RDD[T], task: (Int, Iterator[T]) => Iterator[U])
    extends RDD[U](parent) {

  /** All elements, in the order of their partitions. */
  def all: Seq[U] = context.runJob(this, new ToArray[U]).flatten.toSeq.asInstanceOf[Seq[U]]

  override def getPartitions: Array[Partition] = firstParent[T].partitions

  override def compute(split: Partition, context: TaskContext): Iterator[U] =
    task(split.index, firstParent[T].iterator(split, context))
}

private[spark] final class ToArray[E]
    extends ((TaskContext, Iterator[E]) => Array[Any]) with Serializable {
  override def apply(context: TaskContext, elements: Iterator[E]): Array[Any] =
    elements.toArray[Any]
}

/** Groups cached partitions by the executor that has them in its memory.
  *
  * Spark's own coalescer knows hosts only: of two executors on a host, each would fetch about half of
  * its partitions from the other.
  *
  * @param executors of each partition
  */
private[spark] final class ByExecutor private (@transient executors: Array[Option[String]])
    extends PartitionCoalescer with Serializable {
  override def coalesce(most: Int, parent: RDD[_]): Array[PartitionGroup] = {
    val all = parent.partitions
    for {
      (executor, its) <- all.groupBy(partition => executors(partition.index)).toArray
      count = math.max(1, math.round(most.toFloat * its.length / all.length))
      k <- 0 until count
      some = its.slice(k * its.length / count, (k + 1) * its.length / count)
      if some.nonEmpty
    } yield {
      val group = new PartitionGroup(executor)
      group.partitions ++= some
      group
    }
  }
}

private[spark] object ByExecutor {

  /** For an RDD that is cached whole. */
  def of(rdd: RDD[_]): Option[ByExecutor] = {
    val executors = rdd.partitions.map(partition => Internals.executor(rdd, partition.index))
    if (executors.contains(None)) None else Some(new ByExecutor(executors))
  }
}
