package alchemist

import java.util.{ArrayList, HashMap, List => JList}

import scala.annotation.varargs
import scala.collection.JavaConverters._

import org.apache.spark.SparkContext
import org.apache.spark.mllib.linalg.distributed.{
  BlockMatrix, CoordinateMatrix, IndexedRowMatrix, RowMatrix}
import org.apache.spark.sql.{DataFrame, SparkSession}

import alchemist.spark.Dropped

/** A session of Alchemist for programs in Scala and Java: a gang of MPI ranks, and its libraries.
  *
  * A helper process, `python -m alchemist_ray.clients.spark.jvm_session`, holds the session, as a
  * Python program would. No data passes through it: rows travel between the executors and the
  * ranks. It ends with this process.
  *
  * @param spark the Spark whose executors have the data
  * @param numWorkers MPI ranks of the gang
  * @param options keyword arguments of `AlchemistSession` in Python: "name", "address",
  *   "max_failures", ...
  */
class AlchemistContext(val spark: SparkSession, numWorkers: Int, options: Map[String, Any])
    extends AutoCloseable {

  def this(spark: SparkSession, numWorkers: Int) = this(spark, numWorkers, Map.empty[String, Any])

  /** As in the paper. */
  def this(sc: SparkContext, numWorkers: Int) =
    this(SparkSession.builder.config(sc.getConf).getOrCreate(), numWorkers)

  private val matrices = new Dropped
  private val helper = new Helper(spark, this)

  try {
    request("open", Int.box(numWorkers), java(options))
    AlchemistContext.opened(this)
  } catch {
    case error: Throwable =>
      helper.close()
      throw error
  }

  /** Load a library on every rank: a shipped or installed one by its name. */
  def registerLibrary(name: String): Unit = request("load", name, null)

  /** Load a library on every rank.
    *
    * @param path a Python file, or a shared object with Alchemist's C ABI, that every node reads
    */
  def registerLibrary(name: String, path: String): Unit = request("load", name, path)

  /** Call a routine, and wait for its results.
    *
    * @param args AlMatrix, numbers, booleans, strings and sequences; a pair of a name and a value
    *   is a keyword argument
    * @return an array of the results: AlMatrix, numbers, strings, lists
    */
  @varargs
  def run(library: String, routine: String, args: Any*): Array[Any] = {
    val positional = new ArrayList[Any]
    val keywords = new HashMap[String, Any]
    args.foreach {
      case (name: String, value) => keywords.put(name, java(value))
      case value => positional.add(java(value))
    }
    request("run", library, routine, positional, keywords) match {
      case values: JList[_] => values.asScala.toArray[Any]
    }
  }

  /** Send a DataFrame or a distributed matrix of MLlib. */
  private[alchemist] def send(kind: String, data: Any, sizes: Int*): AlMatrix =
    request("send", kind, data, new ArrayList[Any](sizes.map(Int.box).asJava)) match {
      case matrix: AlMatrix => matrix
    }

  /** A matrix as an object of Spark. */
  private[alchemist] def receive(matrix: AlMatrix, kind: String): Any =
    request("receive", Long.box(matrix.id), kind)

  private[alchemist] def free(id: Long): Unit = request("free", Long.box(id))

  /** End the session, and free its gang unless it has a name and was detached. */
  def stop(): Unit = {
    AlchemistContext.closed(this)
    helper.close()
  }

  override def close(): Unit = stop()

  private def request(operation: String, arguments: Any*): Any = {
    val dropped = Iterator.continually(matrices.poll()).takeWhile(_ >= 0)
    helper.request(operation, arguments, dropped.map(Long.box(_): Any).toList)
  }

  /** A value as Python gets it. */
  private def java(value: Any): Any = value match {
    case matrix: AlMatrix =>
      require(matrix.context eq this, s"$matrix belongs to another AlchemistContext")
      matrix
    case map: Map[_, _] => new HashMap[Any, Any](map.map(p => p._1 -> java(p._2)).asJava)
    case array: Array[_] => java(array.toSeq)
    case values: Seq[_] => new ArrayList[Any](values.map(java).asJava)
    case Some(some) => java(some)
    case None => null
    case other => other
  }

  /** A result, which is freed some time after the program has dropped it. */
  private[alchemist] def matrix(
      id: Long, name: String, rows: Long, cols: Long, dtype: String, layout: String): AlMatrix = {
    val made = new AlMatrix(this, id, name, rows, cols, dtype, layout)
    matrices.watch(made, id)
    made
  }
}

object AlchemistContext {
  private var contexts = List.empty[AlchemistContext]

  private def opened(context: AlchemistContext): Unit = synchronized { contexts ::= context }

  private def closed(context: AlchemistContext): Unit =
    synchronized { contexts = contexts.filterNot(_ eq context) }

  /** The context that was opened last and is not stopped. */
  def current: AlchemistContext = synchronized {
    contexts.headOption.getOrElse(
      throw new AlchemistException(
        "SessionError", "there is no AlchemistContext: create one with new AlchemistContext(sc, 4)"))
  }
}

/** The 2018 paper's name of the context: `new Alchemist.AlchemistContext(sc, numWorkers)`. */
object Alchemist {
  type AlchemistContext = alchemist.AlchemistContext
}

/** An error of Alchemist.
  *
  * @param kind its class in Python's `alchemist_ray.errors`
  */
class AlchemistException(val kind: String, message: String)
    extends RuntimeException(s"$kind: $message")

/** A matrix on a gang. Its elements stay there until the program asks for them.
  *
  * The matrix is freed by `free`, or some time after the program has dropped the object and all
  * objects of Spark that were made of it.
  *
  * @param context what sent or computed it: a wrapper calls its routine by `context.run`
  * @param dtype NumPy's name: "float64", ...
  * @param layout its distribution over the ranks, as Elemental names it
  */
final class AlMatrix private[alchemist] (
    val context: AlchemistContext,
    private[alchemist] val id: Long,
    val name: String,
    val numRows: Long,
    val numCols: Long,
    val dtype: String,
    val layout: String) {

  // Each is lazy: Spark's tasks fetch the rows at each use, so cache what is used twice.

  def toIndexedRowMatrix(): IndexedRowMatrix =
    context.receive(this, "IndexedRowMatrix").asInstanceOf[IndexedRowMatrix]

  def toRowMatrix(): RowMatrix = context.receive(this, "RowMatrix").asInstanceOf[RowMatrix]

  def toBlockMatrix(): BlockMatrix = context.receive(this, "BlockMatrix").asInstanceOf[BlockMatrix]

  def toCoordinateMatrix(): CoordinateMatrix =
    context.receive(this, "CoordinateMatrix").asInstanceOf[CoordinateMatrix]

  def toDataFrame(): DataFrame = context.receive(this, "DataFrame").asInstanceOf[DataFrame]

  /** Free the gang's memory. Objects of Spark that were made of this matrix fail afterwards. */
  def free(): Unit = context.free(id)

  override def toString: String = s"AlMatrix $name, $numRows x $numCols, $dtype, $layout"
}

/** Sends matrices to the gang of the current context; missing rows and blocks are zero. */
object AlMatrix {
  def apply(matrix: RowMatrix): AlMatrix = AlchemistContext.current.send("RowMatrix", matrix)

  def apply(matrix: IndexedRowMatrix): AlMatrix =
    AlchemistContext.current.send("IndexedRowMatrix", matrix)

  def apply(matrix: BlockMatrix): AlMatrix =
    AlchemistContext.current.send(
      "BlockMatrix", matrix, matrix.rowsPerBlock, matrix.colsPerBlock)

  def apply(matrix: CoordinateMatrix): AlMatrix =
    AlchemistContext.current.send("CoordinateMatrix", matrix)

  /** Rows in the order of the DataFrame's partitions. */
  def apply(frame: DataFrame): AlMatrix = AlchemistContext.current.send("DataFrame", frame)
}
