package alchemist.spark

import java.util.Arrays

import scala.collection.JavaConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.mllib.linalg.{DenseVector, SparseVector, Vector}
import org.apache.spark.mllib.linalg.distributed.IndexedRow
import org.apache.spark.sql.{Dataset, Row}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions._
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project}
import org.apache.spark.sql.catalyst.util.ArrayData
import org.apache.spark.sql.execution.columnar._
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector
import org.apache.spark.sql.types._
import org.apache.spark.sql.vectorized.ColumnarArray
import org.apache.spark.unsafe.Platform

/** Reads rows of Spark's internal form, and of MLlib, as elements of a matrix. */
private[spark] final class Columns(json: JsonNode, element: Element, ordinals: Seq[Int]) {
  val all: Array[Column] =
    json.asScala.toArray.zipAll(ordinals, null, 0).map { case (one, k) => new Column(one, k) }

  /** All columns are 8 bytes that are the element's own. */
  private val words = element.nbytes == 8 && all.forall(column => column.scalar && column.same)

  /** Copy a row to `at` in a block. */
  def read(row: Any, block: Array[Byte], at: Int): Unit = row match {
    case packed: UnsafeRow if words && !packed.anyNull =>
      val bits = UnsafeRow.calculateBitSetWidthInBytes(packed.numFields)
      Platform.copyMemory(
        packed.getBaseObject, packed.getBaseOffset + bits,
        block, Block.BASE + at, 8L * all.length)
    case fields: InternalRow =>
      var k = 0
      var to = at
      while (k < all.length) {
        all(k).read(fields, k, block, to)
        to += all(k).width * element.nbytes
        k += 1
      }
    case numbered: IndexedRow => all(0).read(numbered.vector, block, at)
    case vector: Vector => all(0).read(vector, block, at)
  }

  /** A column of Spark, and its elements in a row of the matrix.
    *
    * @param ordinal its place in a batch
    */
  final class Column(json: JsonNode, ordinal: Int) {
    val name: String = json.get("name").asText
    val width: Int = json.get("width").asInt
    val scalar: Boolean = json.get("kind").asText == "scalar"
    private val isVector = json.get("kind").asText == "vector" // a list if neither
    private val from = Element.of(json.get("type").asText) // of vectors and lists, their elements

    /** Whether its elements are stored as those of the matrix. */
    val same: Boolean = from == element

    def read(row: InternalRow, field: Int, block: Array[Byte], at: Int): Unit = {
      if (row.isNullAt(field)) throw nulls
      if (scalar) {
        element.store(block, at, row, field, from, name)
      } else if (!isVector) {
        val list = row.getArray(field)
        for (j <- 0 until list.numElements) if (list.isNullAt(j)) throw nulls
        values(list, block, at)
      } else {
        val vector = row.getStruct(field, 4)
        if (vector.getByte(0) == SPARSE) {
          sparse(vector.getInt(1), vector.getArray(2).toIntArray, vector.getArray(3).toDoubleArray,
            block, at)
        } else {
          values(vector.getArray(3), block, at)
        }
      }
    }

    def read(vector: Vector, block: Array[Byte], at: Int): Unit = vector match {
      case dense: DenseVector =>
        checkWidth(dense.size)
        element.store(block, at, dense.values, name)
      case some: SparseVector => sparse(some.size, some.indices, some.values, block, at)
    }

    private def sparse(
        size: Int, indices: Array[Int], values: Array[Double], block: Array[Byte],
        at: Int): Unit = {
      checkWidth(size)
      Arrays.fill(block, at, at + width * element.nbytes, 0.toByte)
      for (j <- indices.indices) {
        element.store(block, at + indices(j) * element.nbytes, values(j), name)
      }
    }

    private def values(list: ArrayData, block: Array[Byte], at: Int): Unit = {
      val count = list.numElements
      checkWidth(count)
      list match {
        case packed: UnsafeArrayData if same =>
          val start =
            packed.getBaseOffset + UnsafeArrayData.calculateHeaderPortionInBytes(count)
          Platform.copyMemory(
            packed.getBaseObject, start, block, Block.BASE + at, count.toLong * element.nbytes)
        case _ =>
          for (j <- 0 until count) {
            element.store(block, at + j * element.nbytes, list, j, from, name)
          }
      }
    }

    private def checkWidth(found: Int): Unit = if (found != width) {
      throw Failure("ShapeError", s"column '$name' has a row of $found elements where others have " +
        s"$width: the rows of a matrix must have the same length")
    }

    private def nulls: Failure = {
      val remedy =
        if (scalar) "fill or drop them first (df.na.fill, df.na.drop; in Python also missing=)"
        else if (isVector) "drop their rows first (df.na.drop)"
        else "drop the rows of null lists first (df.na.drop), fill nulls inside of lists (transform, " +
          "coalesce)"
      Failure("DtypeError", s"column '$name' has nulls, which a matrix cannot represent: $remedy")
    }

    /** The values of this column of scalars in a batch of Spark's cache, and their first byte.
      *
      * The cache has the number of its nulls and their places, the number of an encoding, and the
      * encoded values, in the byte order of the machine. Values that are neither encoded nor to be
      * converted are given as they are; Spark decodes others.
      */
    def stored(batch: DefaultCachedBatch): (Array[Byte], Int) = {
      val buffer = batch.buffers(ordinal)
      if (Platform.getInt(buffer, Block.BASE) > 0) throw nulls
      val encoding = Platform.getInt(buffer, Block.BASE + 4)
      if (same && encoding == Internals.plain) (buffer, HEADER_BYTES)
      else (decoded(buffer, batch.numRows), 0)
    }

    private var reused = Array.emptyByteArray

    private def decoded(buffer: Array[Byte], rows: Int): Array[Byte] = {
      if (reused.length < rows * element.nbytes) reused = new Array(rows * element.nbytes)
      val vector = new OnHeapColumnVector(rows, from.sparkType)
      try {
        Internals.decode(buffer, vector, from.sparkType, rows)
        val values = new ColumnarArray(vector, 0, rows)
        var j = 0
        while (j < rows) {
          element.store(reused, j * element.nbytes, values, j, from, name)
          j += 1
        }
      } finally vector.close()
      reused
    }
  }

  private val SPARSE: Byte = 0
  private val HEADER_BYTES = 8 // of a column in the cache, without nulls

  private val values = new Array[Array[Byte]](all.length) // of a batch
  private val first = new Array[Int](all.length)

  /** Columns of batches that were not decoded. */
  var direct = 0L

  /** Send a batch of Spark's cache, whose first row is `row` of the matrix, from where it is stored.
    */
  def send(batch: DefaultCachedBatch, row: Long, block: Block): Unit = {
    val began = System.nanoTime
    val parts = block.parts(row, batch.numRows)
    var k = 0
    while (k < all.length) {
      val (its, start) = all(k).stored(batch)
      values(k) = its
      first(k) = start
      if (start > 0) direct += 1
      var p = 0
      while (p < parts.length) {
        parts(p).put(k, its, start)
        p += 1
      }
      k += 1
    }
    block.took(began)
    if (block.far) {
      for (start <- 0 until batch.numRows by block.capacity) {
        val count = math.min(block.capacity, batch.numRows - start)
        val nbytes = count * element.nbytes
        for (k <- all.indices) {
          System.arraycopy(
            values(k), first(k) + start * element.nbytes, block.bytes, k * nbytes, nbytes)
        }
        val region = Region(row + start, row + start + count, 0, all.length)
        block.stream(region, byRow = false, block.bytes, 0)
      }
    }
  }
}

/** A dtype of Spark's columns: how a value is stored as one
  * without loss. An element overrides one of the two `store`.
  */
private[spark] sealed abstract class Element(val nbytes: Int, val sparkType: DataType)
    extends Serializable {

  val name: String = toString.toLowerCase

  def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
    store(block, at, value.toDouble, column)

  def store(block: Array[Byte], at: Int, value: Double, column: String): Unit = {
    val whole = value.toLong
    if (whole != value || value == Element.BEYOND_LONG) throw outOfRange(value.toString, column)
    store(block, at, whole, column)
  }

  /** Store a field of a row, or an element of an array, that is a `from` there. */
  final def store(
      block: Array[Byte], at: Int, row: SpecializedGetters, field: Int, from: Element,
      column: String): Unit = from match {
    case Element.Float64 => store(block, at, row.getDouble(field), column)
    case Element.Int64 => store(block, at, row.getLong(field), column)
    case Element.Int32 => store(block, at, row.getInt(field).toLong, column)
    case Element.Float32 => store(block, at, row.getFloat(field).toDouble, column)
    case Element.Int16 => store(block, at, row.getShort(field).toLong, column)
    case Element.Int8 => store(block, at, row.getByte(field).toLong, column)
    case Element.Bool => store(block, at, if (row.getBoolean(field)) 1L else 0L, column)
  }

  /** A bool or an int8; others override it. */
  def load(block: Array[Byte], from: Long): Double = Platform.getByte(block, from)

  /** Copy doubles to elements. */
  def store(block: Array[Byte], at: Int, values: Array[Double], column: String): Unit = {
    var k = 0
    while (k < values.length) {
      store(block, at + k * nbytes, values(k), column)
      k += 1
    }
  }

  /** Copy elements, each `step` bytes after the one before, to doubles. */
  def load(block: Array[Byte], at: Int, step: Int, into: Array[Double]): Unit = {
    var k = 0
    while (k < into.length) {
      into(k) = load(block, Block.BASE + at + k * step)
      k += 1
    }
  }

  protected def outOfRange(value: String, column: String): Failure =
    Failure("DtypeError", s"column '$column' has the value $value, which $name cannot represent: " +
      "send it with another dtype, or convert it first")
}

private[spark] object Element {
  private val BEYOND_LONG = math.pow(2, 63)

  def of(dtype: String): Element =
    Seq(Bool, Int8, Int16, Int32, Int64, Float32, Float64).find(_.name == dtype).get

  case object Bool extends Element(1, BooleanType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
      Platform.putByte(block, Block.BASE + at, if (value != 0) 1 else 0)
  }

  case object Int8 extends Element(1, ByteType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit = {
      if (value != value.toByte) throw outOfRange(value.toString, column)
      Platform.putByte(block, Block.BASE + at, value.toByte)
    }
  }

  case object Int16 extends Element(2, ShortType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit = {
      if (value != value.toShort) throw outOfRange(value.toString, column)
      Platform.putShort(block, Block.BASE + at, value.toShort)
    }
    override def load(block: Array[Byte], from: Long): Double = Platform.getShort(block, from)
  }

  case object Int32 extends Element(4, IntegerType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit = {
      if (value != value.toInt) throw outOfRange(value.toString, column)
      Platform.putInt(block, Block.BASE + at, value.toInt)
    }
    override def load(block: Array[Byte], from: Long): Double = Platform.getInt(block, from)
  }

  case object Int64 extends Element(8, LongType) {
    override def store(block: Array[Byte], at: Int, value: Long, column: String): Unit =
      Platform.putLong(block, Block.BASE + at, value)
    override def load(block: Array[Byte], from: Long): Double = Platform.getLong(block, from).toDouble
  }

  case object Float32 extends Element(4, FloatType) {
    override def store(block: Array[Byte], at: Int, value: Double, column: String): Unit = {
      val rounded = value.toFloat
      if (rounded.isInfinite && !value.isInfinite) throw outOfRange(value.toString, column)
      Platform.putFloat(block, Block.BASE + at, rounded)
    }
    override def load(block: Array[Byte], from: Long): Double = Platform.getFloat(block, from)
  }

  case object Float64 extends Element(8, DoubleType) {
    override def store(block: Array[Byte], at: Int, value: Double, column: String): Unit =
      Platform.putDouble(block, Block.BASE + at, value)
    override def store(
        block: Array[Byte], at: Int, values: Array[Double], column: String): Unit =
      Platform.copyMemory(
        values, Platform.DOUBLE_ARRAY_OFFSET, block, Block.BASE + at, 8L * values.length)
    override def load(block: Array[Byte], from: Long): Double = Platform.getDouble(block, from)
    override def load(block: Array[Byte], at: Int, step: Int, into: Array[Double]): Unit =
      Platform.copyMemory(
        block, Block.BASE + at, into, Platform.DOUBLE_ARRAY_OFFSET, 8L * into.length)
  }
}

/** The columns of a DataFrame in Spark's cache. */
private[spark] object Batches {

  /** Batches of Spark's cache as it stores them, if the frame only chooses and renames columns. */
  def stored(frame: Dataset[Row]): Option[OrderedRows] = {
    val plan = frame.queryExecution.withCachedData // Spark keeps it with the frame
    find(plan, plan.output.map(_.exprId))
  }

  private def find(plan: LogicalPlan, columns: Seq[ExprId]): Option[OrderedRows] = plan match {
    case Project(made, child) =>
      val of = made.map(named => named.exprId -> named).toMap
      all(columns)(of.get(_).collect {
        case attribute: Attribute => attribute.exprId
        case Alias(attribute: Attribute, _) => attribute.exprId
      }).flatMap(find(child, _))
    case cache: InMemoryRelation
        if cache.cacheBuilder.serializer.getClass == classOf[DefaultCachedBatchSerializer] =>
      val batches = cache.cacheBuilder.cachedColumnBuffers
      all(columns)(cache.output.map(_.exprId).zipWithIndex.toMap.get)
        .map(new OrderedRows(batches, batches, _))
    case _ => None
  }

  private def all[T](columns: Seq[ExprId])(find: ExprId => Option[T]): Option[Seq[T]] = {
    val found = columns.flatMap(find(_))
    if (found.size == columns.size) Some(found) else None
  }
}
